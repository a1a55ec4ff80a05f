"""What a run takes on devices that need not be there, and the best placement of its roles: `async-rlhf plan` and `try machine`.

model        what stages take: sizes of models, devices, rooflines, and the step that follows from them
simulation   a run on virtual time by these stages or by fitted constants, with the real admission of the queue
placement    which role goes on which devices: the question, the search, the answer
calibration  this machine as a device, and the constants of a run that has ended
validation   the model beside published figures, and beside measured runs
"""
