"""Checkpoints: whole or not at all, for any layout. Start with checkpoints.py."""
