"""How lines of several runs are told apart: by colour, and by marker and dash where colours are alike or grey."""

COLOURS = ("#0077bb", "#ee7733", "#009988", "#cc3311", "#aa3377", "#6b6b6b")
MARKERS = "osD^vPX*<>ph"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
