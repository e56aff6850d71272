"""The same federated work on fedring, Flower and NVFlare, by turns: see __main__.py."""
