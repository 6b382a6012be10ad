"""Asteroid (MobiCom 2024): its environments, and its tables and figures in virtual time."""
