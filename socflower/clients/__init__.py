"""ClientApp side of Flower: the wrappers `make_client_app` and `make_split_client_app`, and mods."""
