"""The protocols of perplexity: each decides which predictions of a text count, in which contexts, and how to
average.
"""
