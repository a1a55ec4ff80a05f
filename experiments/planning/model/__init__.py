"""The seconds of stages on given devices: sizes of models and rooflines."""
