"""Methods that change a whole model before it is cut: unit scaling, Smooth-SwiGLU."""
