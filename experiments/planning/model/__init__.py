"""What stages take on given devices: sizes of models, rooflines, and the step that follows from them."""
