"""The protocols of perplexity: each chooses the scored predictions of a text, their contexts, and the average."""
