"""Other packages' names for crossweft, when asked for."""
