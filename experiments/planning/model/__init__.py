"""What stages take on given devices: sizes of models and rooflines."""
