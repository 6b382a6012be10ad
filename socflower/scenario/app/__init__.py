"""The Flower app of every scenario: what its ServerApp and ClientApps do on all engines."""
