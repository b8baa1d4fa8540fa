"""The backend "inductor-exact": inductor fuses only calls whose results stay equal to eager code's results, bit for bit."""
