"""Tiles of attention, forward and backward; `capability.py` says what each kernel can do."""
