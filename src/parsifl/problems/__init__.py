"""Models with a loss: any `nn.Module`, and generalised linear models."""
