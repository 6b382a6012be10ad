"""A plain Flower App: FedAvg, a loop over a DataLoader, torch. `../after` is the same app under SoCFlow."""
