"""What each layer saves: the best choices of a layer, of all layers, and within a budget."""
