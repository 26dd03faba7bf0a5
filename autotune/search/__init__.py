"""The search. Optuna lives here alone."""
