"""Model families: where their seams are, measured on the model itself."""
