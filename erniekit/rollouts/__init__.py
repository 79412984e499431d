"""Sample groups of answers from the weights that are being trained, score them, and make updates of them."""
