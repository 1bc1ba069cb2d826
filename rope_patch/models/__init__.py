"""Model families: their interfaces, measured on the model itself."""
