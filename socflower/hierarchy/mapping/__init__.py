"""Mapping groups to boards with the least traffic between boards (F5)."""
