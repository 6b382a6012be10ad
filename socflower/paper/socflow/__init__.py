"""SoCFlow (ASPLOS 2024, the slides): their statements and figures from our cost model and trainings."""
