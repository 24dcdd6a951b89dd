"""What a watch reads in a run: hooks of the loop, the meter, the columns of a record."""
