"""From an intent to a first kernel: a catalogue of strategies per operator, and the parser of plain English."""
