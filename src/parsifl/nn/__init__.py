"""Neural networks as federated problems: modules, layers, models."""
