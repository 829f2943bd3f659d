/** The page of one run: a store, the socket that fills it, and the views that show it. */

import { askBeforeSubmit } from "./confirm.js";
import { settleDraft } from "./draft.js";
import { showLossChart } from "./loss_chart.js";
import { showCheckpoints } from "./run_checkpoints.js";
import { showFeed } from "./run_feed.js";
import { showFigures } from "./run_figures.js";
import { RunSocket } from "./run_socket.js";
import { showStatus } from "./run_status.js";
import { RunStore } from "./run_store.js";

const page = document.querySelector("[data-run-id]");
const store = new RunStore();

for (const show of [showStatus, showFigures, showLossChart, showCheckpoints, showFeed]) show(store, page);
askBeforeSubmit(page);
settleDraft();
new RunSocket(store, page.dataset.runId);
