"""Save and load patched models, and express schemes in the config fields of Transformers and of servers."""
