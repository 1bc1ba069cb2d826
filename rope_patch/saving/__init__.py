"""How a patched model is saved, loaded, and said in the words of Transformers and of servers."""
