"""Plugins for servers; only the server itself imports them."""
