import{a,b}from"./chunk-PADSP2YP.js";import"./chunk-OOJM4CTU.js";export{a as Answer,b as copied};
