"""Plans of chunks and the pipelines that run them. Nothing here knows Adam or torch.optim."""
