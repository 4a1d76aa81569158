"""Problems of the regression families that are no generalized linear model."""
