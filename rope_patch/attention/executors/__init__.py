"""The executors: each file is a way to compute a call, with `supports`, the reason why it cannot, and `attend`."""
