//! Contract 2, the table: what may enter it, who wins a race, how long it lasts; and the C face of what is in it.

mod adoption;
mod c_face;
mod registration;
