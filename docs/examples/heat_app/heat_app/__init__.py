"""A plain Flower App: FedAvg and torch. The heat mod is one line of client_app.py."""
