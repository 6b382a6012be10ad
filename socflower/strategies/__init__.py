"""ServerApp side of Flower: adapters from plans to messages and back."""
