"""Stages that a machine runs once for all its actors. The doors are `actors.scorer.server` and `actors.scorer.client`."""
