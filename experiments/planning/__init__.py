"""What a run takes on devices that need not be there, and the best placement of its roles: `async-rlhf plan` and `try machine`.

model        what stages take: sizes of models, devices, rooflines or fitted constants, and the step that follows from them
simulation   a run on virtual time by the same stages, with the real admission of the queue
placement    which role goes on which devices: the question, the search, the answer
calibration  constants of this machine, and of a run that has ended
validation   the model beside published figures, and beside measured runs
"""
