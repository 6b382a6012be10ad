"""Mandheling (MobiCom 2022): its tables and figures from predictions, small computations and stored results."""
