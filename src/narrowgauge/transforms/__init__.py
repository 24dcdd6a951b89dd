"""Methods that change a whole model before its optimizer is made: Scalify."""
