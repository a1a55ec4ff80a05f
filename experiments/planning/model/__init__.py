"""What stages take on given devices: sizes of models, rooflines, fitted constants, and the step that follows from them."""
