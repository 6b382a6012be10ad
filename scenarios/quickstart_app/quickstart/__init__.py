"""A Flower App with socflower: the strategy in server_app.py, the client wrapper in client_app.py."""
