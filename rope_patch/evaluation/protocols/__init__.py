"""The protocols of perplexity: which predictions of a text count, in which contexts, and their mean."""
