"""Retrieval: does the model find what it read at some depth of a context of some length?"""
