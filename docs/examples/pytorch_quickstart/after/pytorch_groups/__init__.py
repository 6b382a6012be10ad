"""The app of `../before`, converted: SoCFlow in server_app.py, make_client_app in client_app.py."""
