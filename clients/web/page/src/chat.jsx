/** The chat page. */

import { render } from "preact";
import { start } from "./model/app.js";
import { Page } from "./ui/page.jsx";

render(<Page />, document.getElementById("page"));
start();
