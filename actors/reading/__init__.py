"""Texts read while they are being written, by a decoder that keeps their keys and values. The door is `kept`."""
