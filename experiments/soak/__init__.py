"""One endless run under everything that an operator and bad luck do to it: does it stay as small as it was?"""
