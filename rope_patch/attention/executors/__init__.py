"""The executors, one file each. `attend` computes a call; `supports` gives the reason why it cannot, or an empty
string.
"""
