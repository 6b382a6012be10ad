"""Hybrid pipeline parallelism over unequal devices (Asteroid): costs, plans, schedules."""
