"""Stages that a machine runs once for all its actors. The doors are `server` and `client`."""
