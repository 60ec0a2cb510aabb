"""The Hydra configuration tree, as package data."""
