"""Plugins of servers; only the server itself imports them."""
