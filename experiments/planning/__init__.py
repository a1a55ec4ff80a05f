"""A run's time on devices that need not be there, and the best placement of its roles: `async-rlhf plan`, `try machine`.

model        the seconds of stages: sizes of models, devices, rooflines
placement    which role goes on which devices: the question, the pools, the step that follows, the search
calibration  this machine as a device, and what a finished run has reached
validation   the model beside published figures
command      what is printed
"""
